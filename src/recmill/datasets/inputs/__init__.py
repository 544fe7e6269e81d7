"""Reading what users bring: delimited text, JSON lines and Parquet; one file or many; local or in object storage."""
