"""Report 004."""
