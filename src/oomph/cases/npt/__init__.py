"""Report 003."""
