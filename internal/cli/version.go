package cli

// Version is the release all of Warren's programs belong to.
const Version = "0.1.0-dev"
