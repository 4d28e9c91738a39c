"""Record and replay: a function's ops become one template, and later calls issue one record."""
