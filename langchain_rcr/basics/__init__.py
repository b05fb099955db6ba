"""What every room uses: examples, sparse rows, files written atomically, settings, progress, the background loop."""
