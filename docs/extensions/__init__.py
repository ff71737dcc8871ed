"""What the site needs beside Sphinx: links into the repository, pages made from the code, pictures, formulas."""
