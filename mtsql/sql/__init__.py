"""Everything that knows SQL: parsing, matching, hardness, execution."""
