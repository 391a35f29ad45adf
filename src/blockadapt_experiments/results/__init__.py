"""Reads back what runs measured, with statistics over seeds."""
