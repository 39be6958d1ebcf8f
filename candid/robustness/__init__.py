"""What a classifier does when images get worse, by accident or on purpose."""
