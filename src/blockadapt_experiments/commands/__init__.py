"""Parse what users type, call what does it, and show what came of it."""
