"""Measures how the time of attention, recurrent and convolutional layers grows with their sizes."""
