"""The OpenAI endpoints: request bodies, answers, streams."""
