"""Report 000."""
