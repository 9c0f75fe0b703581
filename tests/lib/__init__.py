"""What several files of tests share; each is named after the tests that it began in."""
