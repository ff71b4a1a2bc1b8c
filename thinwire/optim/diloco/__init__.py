"""DiLoCo: many local steps of any optimizer, and now and then an outer step on the average of what they did."""
