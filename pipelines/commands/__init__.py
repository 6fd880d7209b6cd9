"""What `raybert` does beside the stages."""
