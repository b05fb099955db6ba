"""What picks are worth before and after they are served: comparisons, and what a log of use teaches (`learn`)."""
