"""The wire contract: `.proto` sources and the stubs generated from them (`make stubs`)."""
