"""The database: tables, migrations, one writer and its readers."""
