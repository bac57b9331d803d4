"""Tables that facts are joined with: what a version has (`lookup_table`), and it in memory, by key (`key_index`)."""
