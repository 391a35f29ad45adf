"""What runs measured, read back, with statistics over seeds."""
