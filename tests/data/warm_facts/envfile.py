"""As python-dotenv does it."""

import os


def load_dotenv(path):
    with open(path) as file:
        for line in file:
            name, _, value = line.strip().partition("=")
            os.environ[name] = value
