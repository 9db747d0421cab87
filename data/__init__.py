"""From text to batches: sources (documents), tokenizer (ids), prepare (files), loader (windows)."""
