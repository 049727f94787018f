"""Episodes to look at: recorded arrays, replay files and the page that plays them."""
