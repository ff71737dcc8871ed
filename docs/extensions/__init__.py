"""What the site needs beside Sphinx: links into the repository, what pages take from the code, pictures."""
