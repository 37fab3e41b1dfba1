"""Whatever only makes pages: suites, arms, findings, tables, figures, comparisons."""
