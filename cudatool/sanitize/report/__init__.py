"""A report in the formats that people and CI systems read, and which of its findings count."""
