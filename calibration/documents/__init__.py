"""Documents of a corpus, as files and data sets have them."""
