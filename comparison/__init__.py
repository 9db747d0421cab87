"""What compare.py makes of its runs: statistics (results.py), figures (figures.py) and a page (page.py)."""
