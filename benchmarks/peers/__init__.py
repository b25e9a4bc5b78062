"""What others do, written plainly, to measure against."""
