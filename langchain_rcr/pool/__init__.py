"""The examples that can be picked: read from what users have, stored, filtered, rendered."""
