"""Loss against bytes sent and against seconds on slow links, of every optimizer at its own best rate."""
