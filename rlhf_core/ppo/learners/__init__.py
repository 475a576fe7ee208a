"""What an update trains: policy and critic, or a policy alone."""
