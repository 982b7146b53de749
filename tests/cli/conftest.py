from command_fixtures import fake_predict, on_terminal, program  # noqa: F401
