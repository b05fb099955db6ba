"""Few-shot prompts and chains for semantic parsing and text-to-SQL."""
