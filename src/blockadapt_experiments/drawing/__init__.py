"""Says what several figures share."""
