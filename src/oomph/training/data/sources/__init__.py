"""Where documents come from: files of text, JSONL and parquet, the standard library, the hub."""
