"""Training, evaluation and data for langchain-rcr's step-by-step retrievers."""
