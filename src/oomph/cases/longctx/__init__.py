"""Report 002."""
