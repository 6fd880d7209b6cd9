"""The parts of `benchmarks.scale`: what a run costs on many machines, from measured inputs."""
