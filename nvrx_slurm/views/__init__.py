"""What people read of a job: readers of its log tree. No job waits for them."""
