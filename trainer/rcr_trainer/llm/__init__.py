"""The one place that calls a language model: dedupe, cache, retries, budget."""
