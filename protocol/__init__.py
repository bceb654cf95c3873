"""What nodes say to each other: identity, manifest, invites, records, messages and transports."""
