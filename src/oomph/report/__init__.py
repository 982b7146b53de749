"""What people see: terminal, JSON, memory snapshot. Reads records only."""
