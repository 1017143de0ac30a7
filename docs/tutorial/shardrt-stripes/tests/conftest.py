pytest_plugins = ["shardrt.testing.pytest_plugin"]
