"""What every stage that trains shares. Each file says where it runs: driver, controller, worker."""
