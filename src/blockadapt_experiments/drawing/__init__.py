"""What several figures share."""
