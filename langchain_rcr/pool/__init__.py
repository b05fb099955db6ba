"""The examples that can be picked: made from what users have, stored, filtered, rendered."""
