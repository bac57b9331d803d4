"""Delta tables as sources: the log (`table_log`), the rows of one data file (`data_file`), and the connector."""
