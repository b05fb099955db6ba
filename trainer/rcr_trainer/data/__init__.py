"""Data: users' files, GeoQuery, COVR-10, text2sql-data and Spider, each as a `Split` of `Example`s."""
