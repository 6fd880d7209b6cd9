"""The commands of `raybert` that are not stages."""
