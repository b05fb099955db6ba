"""The one place that calls a language model: deduplication, cache, retries, budget."""
