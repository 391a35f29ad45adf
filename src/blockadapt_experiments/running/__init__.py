"""Take runs forward, in this process or in several, and keep what they measured."""
