"""Holds the paper's claims, and what they are judged by."""
