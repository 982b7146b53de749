"""Report 001."""
