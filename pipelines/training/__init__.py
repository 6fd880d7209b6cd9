"""Code shared by the stages that train. Each file says where it runs: driver, controller or
worker."""
